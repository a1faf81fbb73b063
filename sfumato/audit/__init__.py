"""Empirical privacy: structural checks, attacks, and lower bounds on epsilon. A lower bound is no proof of privacy."""
