"""What a store leaves behind: files, logs and histories."""
