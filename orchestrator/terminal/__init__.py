"""Shows plans, sweeps, reports and promotions on the terminal with rich; may import every room but `cli`."""
