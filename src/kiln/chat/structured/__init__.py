"""What an answer must look like: schemas checked and bounded, and the grammar that its tokens keep to."""
