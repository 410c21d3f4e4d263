"""Effects: stores, ranks that talk, and the engine that runs plans."""
