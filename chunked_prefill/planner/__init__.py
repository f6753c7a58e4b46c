"""What a model needs of a device, by arithmetic. Imports no torch."""
