"""Numbers, labels and colours of all pictures of attention weights, and the pictures without matplotlib."""
