"""Planning for many processes (ranks) that divide a network among them: what one of them holds, sends, and can keep."""
