# -*- coding: utf-8 -*-
n = int(input())
print(n + 1)
