"""Small tools that know nothing of networks: files, locks, text for a terminal."""
