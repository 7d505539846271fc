"""One module per optional extra, named after it. The core imports none of them."""
