"""Mixtures of experts on GPUs.

grouped.py, grouped_hopper.py, grouped_int8_hopper.py, grouped_dequantized.py    the linear layers of all experts at once
routing.py                                                                       what lies around them
crossing.py                                                                      rows that cross to experts on the CPU, and back
"""
