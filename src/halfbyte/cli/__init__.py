"""The command line: `halfbyte quantize | inspect | eval | generate | chat | bench | explain | doctor`.

A command is the file of its name; main.py finds it; shared/ is what they are made of.
"""

from halfbyte.cli.main import main as main
