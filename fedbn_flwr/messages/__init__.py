"""What server and clients send each other: names, records, and the forms that NumPyClients take."""
