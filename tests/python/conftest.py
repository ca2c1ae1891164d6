"""Tests run on one torch thread: the models are tiny, and a second thread would only wait for the first."""

import torch

torch.set_num_threads(1)
