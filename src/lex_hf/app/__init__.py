"""A page in the browser: texts read in two ways beside each other and written without end; and the page as a Space."""
