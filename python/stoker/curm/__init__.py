"""What of the erasure-coded store's tools needs Python: `stoker curm train`."""
