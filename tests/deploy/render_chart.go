// Renders the templates of a chart as Helm does: Go templates with the functions of sprig.
//
// The test uses it where Helm itself is not installed. Arguments: the chart's folder, and the values
// as JSON. Writes the rendered files, each after a line "--- # NAME".
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"gopkg.in/yaml.v3"
)

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func readYaml(path string) map[string]interface{} {
	text, err := os.ReadFile(path)
	check(err)
	result := map[string]interface{}{}
	check(yaml.Unmarshal(text, &result))
	return result
}

// merge puts the entries of `changes` over those of `values`, object by object.
func merge(values, changes map[string]interface{}) {
	for name, change := range changes {
		inner, isObject := change.(map[string]interface{})
		current, wasObject := values[name].(map[string]interface{})
		if isObject && wasObject {
			merge(current, inner)
		} else {
			values[name] = change
		}
	}
}

func main() {
	folder := os.Args[1]
	values := readYaml(filepath.Join(folder, "values.yaml"))
	changes := map[string]interface{}{}
	check(json.Unmarshal([]byte(os.Args[2]), &changes))
	merge(values, changes)
	// Charts read Chart.yaml's fields under names that begin with a capital.
	chart := map[string]interface{}{}
	for name, value := range readYaml(filepath.Join(folder, "Chart.yaml")) {
		chart[strings.ToUpper(name[:1])+name[1:]] = value
	}
	data := map[string]interface{}{
		"Values":  values,
		"Chart":   chart,
		"Release": map[string]string{"Name": "bloomery", "Namespace": "default", "Service": "Helm"},
	}
	templates := template.New("chart").Option("missingkey=zero").Funcs(sprig.TxtFuncMap())
	templates.Funcs(template.FuncMap{
		"include": func(name string, argument interface{}) (string, error) {
			var output bytes.Buffer
			err := templates.ExecuteTemplate(&output, name, argument)
			return output.String(), err
		},
		"toYaml": func(value interface{}) (string, error) {
			output, err := yaml.Marshal(value)
			return strings.TrimSuffix(string(output), "\n"), err
		},
	})
	paths, err := filepath.Glob(filepath.Join(folder, "templates", "*"))
	check(err)
	sort.Strings(paths)
	for _, path := range paths {
		text, err := os.ReadFile(path)
		check(err)
		_, err = templates.New(filepath.Base(path)).Parse(string(text))
		check(err)
	}
	for _, path := range paths {
		name := filepath.Base(path)
		if strings.HasPrefix(name, "_") || !strings.HasSuffix(name, ".yaml") {
			continue
		}
		var output bytes.Buffer
		check(templates.ExecuteTemplate(&output, name, data))
		fmt.Printf("--- # %s\n%s\n", name, output.String())
	}
}
