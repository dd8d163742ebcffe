"""What is read from files. Each reader is called by one thread. No widgets, no screens."""
