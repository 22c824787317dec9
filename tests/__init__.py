"""The tests of Bloomery. Folders and files mirror src/bloomery."""
