"""What is compared with the installed torch, and how."""
