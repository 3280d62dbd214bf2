"""What a run saves, and how a saved run is resumed."""
