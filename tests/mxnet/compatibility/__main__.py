from compatibility.run import main

main()
