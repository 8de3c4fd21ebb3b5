"""The command line: `halfbyte quantize | inspect | eval | generate | chat | bench | explain | doctor`."""

from halfbyte.cli.main import main as main
