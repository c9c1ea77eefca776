"""This PC: folders and locks, logs, child processes, temperatures. Knows nothing of images."""
