"""Speed: halfbyte and its peers, each in a process of its own, beside what the machine can do."""
