"""What people look at to judge a sweep: plots, the page, the profile's tables."""
