"""The tests, in folders like those of src/halfbyte; shared/ has what they share.

This file keeps pytest from putting this folder on sys.path, where its folders would be found as packages of others, such as `kernels`.
"""
