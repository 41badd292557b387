"""energynn: what does it cost, in energy, time and accuracy, to train a neural network on more GPUs?"""

__version__ = "0.1.0"
