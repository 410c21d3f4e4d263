"""What a leaf of each library is: how to describe it, read its bytes, and make one to be filled."""
