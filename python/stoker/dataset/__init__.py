"""`stoker data`: indexes of data sets."""
