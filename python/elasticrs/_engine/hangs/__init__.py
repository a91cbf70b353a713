"""Finds the ranks that cause a hang, from the flight records and the stacks of all ranks. All functions are
pure, and nothing here imports torch.
"""
