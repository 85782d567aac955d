"""The draft worker: grows token trees for the sequences it is told of."""
