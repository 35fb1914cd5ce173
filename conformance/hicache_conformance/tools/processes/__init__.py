"""Child processes and threads, and the resources that they use."""
