"""How far each sequence goes in a step, and when. Imports no torch."""
