"""What torch.fx finds in convolutional networks: operations that more than one rewriter looks for."""

from __future__ import annotations

import operator

import torch
from torch import nn

SAME = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Identity)  # in evaluation
ADDS = (operator.add, operator.iadd, torch.add)
RELUS = (torch.relu, nn.functional.relu, "relu", "relu_")
