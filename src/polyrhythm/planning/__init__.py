"""What a layout would cost, from stage times: pure, so that any command or search may ask."""
