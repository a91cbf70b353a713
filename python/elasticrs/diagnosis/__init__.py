"""Names the culprit of a hang: which ranks keep the others waiting, from the flight records and the stacks of
all ranks. All functions are pure, and nothing here imports torch.
"""
