"""Shows plans, sweeps, reports and promotions on the terminal with rich; imports every room but `cli`."""
