"""Models of other people's libraries, trained under every strategy and under DDP: `make projects`."""
