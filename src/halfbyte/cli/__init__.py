"""The command line: `halfbyte quantize | inspect | eval | bench | explain | doctor`."""

from halfbyte.cli.main import main as main
