"""What explains a refusal: causes, and changes that may mend them."""
