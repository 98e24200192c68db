"""What a finished run is used for: its model evaluated on any data, and exported."""
