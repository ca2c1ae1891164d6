"""`stoker trace`: one step of a model that does not fit, as a picture."""
