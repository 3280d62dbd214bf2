"""A small vision-language-action policy that trains on two CPU cores."""
