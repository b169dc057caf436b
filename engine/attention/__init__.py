"""How a step's tokens attend to the paged cache: by torch everywhere, by kernels of other libraries where they are installed."""
