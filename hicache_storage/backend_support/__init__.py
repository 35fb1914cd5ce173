"""Building blocks that backends share: executors, fork handling, counters, deadlines, files."""
