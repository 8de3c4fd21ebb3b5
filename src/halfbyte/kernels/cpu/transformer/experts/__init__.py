"""Mixtures of experts on CPUs.

steps.py, plan.py  few rows, such as those of a decode step: threads share each expert
items.py           many rows, such as those of a prompt: each thread computes experts of its own
"""
