from behaviour import scenario
