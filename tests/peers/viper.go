// A program that watches its configuration with viper, as many programs in containers do.
package main

import (
	"fmt"
	"os"

	"github.com/fsnotify/fsnotify"
	"github.com/spf13/viper"
)

func main() {
	viper.SetConfigFile(os.Args[1])
	if err := viper.ReadInConfig(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	viper.OnConfigChange(func(fsnotify.Event) { fmt.Println("changed to", viper.GetString("port")) })
	viper.WatchConfig()
	fmt.Println("watching", viper.GetString("port"))
	select {}
}
