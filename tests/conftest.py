"""What holds for every test."""

import signal

import torch

torch.set_num_threads(1)  # test files run side by side, one on each core

# A job started in the background inherits an ignored Ctrl-C, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
