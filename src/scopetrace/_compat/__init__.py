"""The only place that uses private torch names. One module for each part of torch that they come from."""
