"""What every picture of attention weights is made from: numbers, labels, colours; and those without matplotlib."""
