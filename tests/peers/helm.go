// Renders the templates of a chart as Helm does: by Go's own template engine, with those of Helm's functions that the chart uses.
// It replaces `helm template`, which Debian does not have. It does not check the chart's metadata and hooks, which Helm does.
// Arguments: the templates. Standard input: a JSON object with Values, Release and Chart.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"text/template"
)

func die(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// JSON is YAML.
func toYaml(value interface{}) (string, error) {
	text, err := json.Marshal(value)
	return string(text), err
}

func nindent(count int, text string) string {
	pad := strings.Repeat(" ", count)
	return "\n" + pad + strings.ReplaceAll(text, "\n", "\n"+pad)
}

func quote(value interface{}) string {
	return fmt.Sprintf("%q", fmt.Sprint(value))
}

func orDefault(other, value interface{}) interface{} {
	if truth, _ := template.IsTrue(value); truth {
		return value
	}
	return other
}

func join(separator string, values []interface{}) string {
	words := []string{}
	for _, value := range values {
		words = append(words, fmt.Sprint(value))
	}
	return strings.Join(words, separator)
}

func hasPrefix(prefix, text string) bool {
	return strings.HasPrefix(text, prefix)
}

func main() {
	var data map[string]interface{}
	decoder := json.NewDecoder(os.Stdin)
	decoder.UseNumber()
	die(decoder.Decode(&data))
	functions := template.FuncMap{
		"toYaml": toYaml, "nindent": nindent, "quote": quote, "default": orDefault, "join": join, "hasPrefix": hasPrefix,
	}
	for _, path := range os.Args[1:] {
		text, err := os.ReadFile(path)
		die(err)
		parsed, err := template.New(filepath.Base(path)).Option("missingkey=error").Funcs(functions).Parse(string(text))
		die(err)
		fmt.Println("---")
		die(parsed.Execute(os.Stdout, data))
	}
}
