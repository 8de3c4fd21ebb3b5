"""Tensor parallelism: models that several processes share.

parallelize.py    `parallelize_`; plan.py: how weights are cut; all_reduce.py: sums
"""
