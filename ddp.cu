#include "cs336.h"
