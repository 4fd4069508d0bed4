"""Drafters with weights of their own: one room a method."""
